"""Results that are kept in results/ of the repository, and the tables that docs show of them."""
