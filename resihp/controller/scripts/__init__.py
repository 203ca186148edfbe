"""Scripts that do not report to resihp: `printed_iterations` commits the iterations that such a script prints."""
