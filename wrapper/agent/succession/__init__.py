"""Another supervisor where the old one's node is gone: who is chosen, copies of the journal, and how it starts."""
