"""One iteration: its expected time, and the reasons for a longer one. Pure; reads nothing."""
