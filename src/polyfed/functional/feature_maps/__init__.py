"""Fixed maps of inputs to features, which nobody trains: images, series, numbers of a table, ids of words."""
