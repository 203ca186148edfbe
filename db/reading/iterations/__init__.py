"""The time of one iteration: its expected time, and the reasons for a longer one; scores of ranks; the newest
iterations."""
