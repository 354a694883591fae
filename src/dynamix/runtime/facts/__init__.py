"""What every rank of a job holds alike, and how ranks see that they do."""
