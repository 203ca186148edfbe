"""`resihp status --watch`: show a job on the screen until it ends. `command` redraws, `picture` fits the window."""
