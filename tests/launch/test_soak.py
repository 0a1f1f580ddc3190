"""The soak tests of launch/soak, each with its smallest number of rounds."""
