"""Who may connect and what they may do: users, logins, certificates, the audit log."""
