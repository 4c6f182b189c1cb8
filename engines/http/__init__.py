"""Requests over HTTP, bounded in time, bytes and number."""
