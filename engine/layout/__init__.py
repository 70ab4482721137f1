"""Says where every element of a layer, of a shard and of a host's memory lies."""
