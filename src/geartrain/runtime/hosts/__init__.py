"""Workers on other hosts, reached by tcp."""
