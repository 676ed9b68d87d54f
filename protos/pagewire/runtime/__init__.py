"""What every process needs to speak the contract: connections, server, health, errors, settings, logs, lifetime."""
