"""What the stage scripts share. Importing this package loads no torch and touches no network."""
