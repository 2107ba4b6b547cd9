"""The asyncio and ZeroMQ shell around the coordinator, and the supervision of processes."""
