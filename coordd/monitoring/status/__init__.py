"""`coordd status`: how a job is found, what its ranks tell, and how that reads."""
