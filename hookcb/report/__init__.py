"""The run as a page: one HTML file that shows a training, and holds its data."""
