"""From one command on each node to a run and its clear end."""
