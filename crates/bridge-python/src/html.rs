//! What notebooks show.

/// Returns a short text as HTML.
pub(crate) fn as_html(text: &str) -> String {
    let escaped = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    format!("<code>{escaped}</code>")
}
