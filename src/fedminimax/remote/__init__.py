"""Everything that crosses a network: runs between real sites."""
