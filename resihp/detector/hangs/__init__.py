"""Tell the processes that are stuck from those that only wait for them, when a script makes no progress."""
