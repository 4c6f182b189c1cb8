"""Running a job: folder, stop requests, restarts."""
