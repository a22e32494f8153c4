"""What the processes of a run share on a machine: ports, and counts of what features did."""
