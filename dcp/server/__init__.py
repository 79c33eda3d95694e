"""The process: sockets, clock, threads, configuration. The only place that wires everything."""
