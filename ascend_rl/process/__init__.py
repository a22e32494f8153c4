"""What the processes of a run share on a machine: ports, logs, progress, counts of what features did."""
