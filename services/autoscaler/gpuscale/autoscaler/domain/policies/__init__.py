"""Policies: what each kind of rule makes of the count."""
