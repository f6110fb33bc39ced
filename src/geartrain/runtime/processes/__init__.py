"""Workers as processes: see ``processes``."""
