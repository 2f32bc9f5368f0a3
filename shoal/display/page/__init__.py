"""A page in the browser that shows runs from their folders, while they train and afterwards."""
