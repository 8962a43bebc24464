"""The console: a page that shows the server and its models, and the events it follows."""
