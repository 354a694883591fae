"""Facts that every rank of a job holds alike, and how ranks check that they do."""
