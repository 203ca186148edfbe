"""Reads what training scripts print, so that a script that does not use resihp has iterations as well."""
