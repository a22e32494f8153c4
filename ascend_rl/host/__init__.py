"""The CPU side of a node: cores for processes, garbage collection, the tools of the driver."""
