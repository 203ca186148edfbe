"""Folders in which a site collects files of all users: the audit of decisions, and summaries of running jobs.

Such a folder belongs to root and is sticky, like the spool of the drain hook: everybody may add files, and nobody can
remove or replace those of another user. `folder` checks that. `audit` appends lines to a user's file, and `summaries`
publishes and reads the summaries. Both are off unless `/etc/resihp.toml` names their folders.
"""
