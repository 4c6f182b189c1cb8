"""Page on which people compare images, and records of their votes."""
