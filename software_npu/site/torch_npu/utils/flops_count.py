class FlopsCounter:
    """Only imported here."""
