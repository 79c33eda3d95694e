"""Plans of a cluster: what operators ask for, where copies should be, and the steps. Pure."""
