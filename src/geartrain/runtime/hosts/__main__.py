"""``python -m geartrain.runtime.hosts``: what is started on a host, and starts workers there."""

from geartrain.runtime.hosts.keeper import main

main()
