"""`resihp status --watch`: a job on the screen until it ends. `command` redraws, `picture` is what fits a window."""
