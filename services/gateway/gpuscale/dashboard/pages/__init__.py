"""The pages of the dashboard, one file each."""
