"""Plans before they are needed: what is asked while training goes on, and the answers that are ready when it stops."""
