"""The page on which people compare images, and the records of their votes."""
