"""The routes of the HTTP API and of the console, by subject."""
