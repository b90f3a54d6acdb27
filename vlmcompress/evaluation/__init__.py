"""What a checkpoint costs and wins against its baseline: accuracy, speed, memory; reports, searches and plans made of that."""
