"""What runs around compiled programs: ranks are compared, and values cross the borders of graphs."""
