"""The client side of a DCP connection, sans-IO. Consumers, backups and Spark share it."""
