"""What keeps users from reading or doing what would be wrong."""
