"""What every process needs to speak the contract: servers, channels, health, errors, logging, configuration."""
