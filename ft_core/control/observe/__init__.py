"""What people and other programs see of the job."""
