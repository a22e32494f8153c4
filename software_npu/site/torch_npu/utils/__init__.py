def register_asd_hook(*args) -> None:
    """The detector of silent data corruption: nothing to watch here."""
