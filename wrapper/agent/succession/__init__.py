"""Succession when the supervisor's node is lost: the election, copies of the journal, and the start of a successor."""
