"""ZeroMQ sockets: the hub, its peers, keys, and addresses."""
