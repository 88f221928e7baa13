"""What other people test their own code with; being built."""
