"""Questions that can wait, answered by a process of its own beside the supervisor's."""
