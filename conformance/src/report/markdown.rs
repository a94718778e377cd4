//! Markdown, for a pull request or a page.

use super::{Broken, COUNTS, FaultReport, Host, KNOWN, LeftOut, Report, Summary, native};
use crate::{Bar, Coverage, PairReport, PropertyReport, Verdict, words};

impl Report {
    /// Returns what failed, the matrix of the pairs, the coverage, then every property, the faults, and what was left
    /// out.
    pub fn markdown(&self) -> String {
        let mut text = self.overview();
        let rows = |applies: bool| {
            let fits = move |property: &&PropertyReport| (property.verdict != Verdict::NotApplicable) == applies;
            let of_pair = move |pair| properties(pair).filter(move |(property, _)| fits(property));
            self.pairs.iter().flat_map(of_pair).map(|(property, pair)| row(property, pair)).collect::<Vec<_>>()
        };
        table(&mut text, HEADING, rows(true).into_iter());
        let folded = rows(false);
        if !folded.is_empty() {
            text += &format!(
                "\n<details><summary>{} not apply</summary>\n",
                words::counted_as(folded.len(), "row that does", "rows that do")
            );
            table(&mut text, HEADING, folded.into_iter());
            text += "\n</details>\n";
        }
        let bar = |bar: &&Bar| {
            let Bar { by, kind, pairs, cases, coverage: Coverage { in_place, copied, refused, .. } } = bar;
            format!("| {by} | {kind} | {pairs} | {cases} | {in_place} | {copied} | {refused} |")
        };
        if !self.histogram.is_empty() {
            text += "\n<details><summary>Which cases were run</summary>\n";
            table(
                &mut text,
                "| by | kind | pairs | cases | in place | copied | refused |\n|---|---|--:|--:|--:|--:|--:|",
                self.histogram.bars().iter().map(bar),
            );
            text += "\n</details>\n";
        }
        let fault = |fault: &FaultReport| {
            let word = if fault.is_caught() { "caught" } else { "**survived**" };
            format!(
                "| {} | {} | {} | {word} |",
                cell(&fault.fault),
                fault.must_be_caught_by,
                fault.caught_by.join(", ")
            )
        };
        table(&mut text, "| fault | to be caught by | caught by | |\n|---|---|---|---|", self.faults.iter().map(fault));
        let left = |left: &LeftOut| format!("| {} | {} |", left.adapter, cell(&left.reason));
        table(&mut text, "| left out | reason |\n|---|---|", self.left_out.iter().map(left));
        text
    }

    /// Returns the heading, what failed, the matrix and the coverage: all that a summary shows.
    pub(super) fn overview(&self) -> String {
        let mut text = self.heading();
        text += "\n## Failures\n";
        let failures = self.failures();
        if failures.is_empty() {
            text += "\nNone.\n";
        }
        failures.iter().for_each(|failure| text += &section(failure));
        if let Some(comparison) = &self.comparison {
            text += &format!("\n## Since the baseline\n\n{}\n", comparison.heading());
            let line = |word: &str, line: &String| format!("- {word}: {}\n", plain(&line.replace('\n', " ")));
            text.extend(comparison.worse.iter().map(|worse| line("**worse**", worse)));
            text.extend(comparison.better.iter().map(|better| line("better", better)));
            text.extend(comparison.as_before.iter().map(|known| line("as before", known)));
        }
        if let Some((heading, rows)) = self.matrix().split_first() {
            text += "\n## Pairs\n";
            let line = "|---".repeat(heading.len());
            let row = |row: &Vec<String>| format!("| **{}** | {} |", row[0], row[1..].join(" | "));
            table(&mut text, &format!("| {} |\n{line}|", heading.join(" | ")), rows.iter().map(row));
        }
        if !self.idle().is_empty() {
            text += "\nDoes not apply:\n\n";
            text.extend(self.idle().iter().map(|line| format!("- {}\n", plain(line))));
        }
        let row = |(name, cases, Coverage { in_place, copied, refused, .. }): &(&str, u32, Coverage)| {
            format!("| {name} | {cases} | {in_place} | {copied} | {refused} |")
        };
        table(
            &mut text,
            "| cases of | in all | in place | copied | refused |\n|---|--:|--:|--:|--:|",
            self.coverage().iter().map(row),
        );
        if !self.coverage().is_empty() {
            text += &format!("\n{COUNTS}\n");
        }
        text
    }

    fn heading(&self) -> String {
        let Host { date, os, cpu, cores, python, versions, driver, gpus, .. } = &self.host;
        let versions: Vec<_> = versions.iter().map(|(name, version)| format!("{name} {version}")).collect();
        let driver = driver.iter().map(|driver| format!("driver {driver}"));
        let host: Vec<_> =
            gpus.iter().cloned().chain(driver).chain([format!("{cpu} ({cores} cores)"), os.clone()]).collect();
        let Summary { passed, failed, expected, cases } = self.summary;
        format!(
            "# Conformance on {}\n\n{}. Python {python}, {}. {date}, seed {}.\n\n\
             {passed} passed, {failed} failed, {expected} failed as expected; {cases} cases.\n",
            self.device,
            host.join(", "),
            versions.join(", "),
            self.seed,
        )
    }
}

const HEADING: &str = "| property | pair | cases | in place, copied, refused | verdict | native method | reason |\n\
                       |---|---|--:|---|---|---|---|";

fn properties(pair: &PairReport) -> impl Iterator<Item = (&PropertyReport, &PairReport)> {
    pair.properties.iter().map(move |property| (property, pair))
}

fn row(property: &PropertyReport, pair: &PairReport) -> String {
    let native = property.native.map_or(String::new(), native);
    let reason = cell(property.reason.as_deref().unwrap_or_default());
    let PropertyReport { name, cases, coverage: Coverage { in_place, copied, refused, .. }, .. } = property;
    let (from, to, verdict) = (&pair.from, &pair.to, verdict(property.verdict));
    format!("| {name} | {from} → {to} | {cases} | {in_place}, {copied}, {refused} | {verdict} | {native} | {reason} |")
}

fn section(failure: &Broken<'_>) -> String {
    let Broken { reason, kept, replay, is_known, .. } = failure;
    let known = if *is_known { format!(" ({KNOWN})") } else { String::new() };
    let mut text = format!("\n### {}{known}\n\n{}\n", plain(&failure.full_title()), plain(reason));
    text.extend(kept.map(|kept| format!("\nThe case is kept in `{}`.\n", kept.display())));
    text.extend(replay.iter().map(|replay| format!("\n```sh\n{replay}\n```\n")));
    text
}

/// Appends a table, unless it has no rows.
fn table(text: &mut String, heading: &str, rows: impl Iterator<Item = String>) {
    let mut rows = rows.peekable();
    if rows.peek().is_some() {
        text.extend(["\n", heading, "\n"]);
        rows.for_each(|row| text.extend([&row, "\n"]));
    }
}

fn verdict(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Passed => "passed",
        Verdict::Failed => "**failed**",
        Verdict::Crashed => "**crashed**",
        Verdict::Expected => "failed as expected",
        Verdict::NotApplicable => "not applicable",
    }
}

/// Escapes text for one field of a table.
fn cell(text: &str) -> String {
    plain(text).replace('|', "\\|").replace('\n', " ")
}

/// Escapes text, so that it is shown as it is: a message may look like HTML or Markdown. An underscore between letters
/// means nothing to either.
fn plain(text: &str) -> String {
    let letters: Vec<char> = text.chars().collect();
    let is_word = |at: Option<usize>| at.and_then(|at| letters.get(at)).is_some_and(|letter| letter.is_alphanumeric());
    let mut plain = String::with_capacity(text.len());
    for (at, letter) in letters.iter().enumerate() {
        match letter {
            '&' => plain += "&amp;",
            '<' => plain += "&lt;",
            '>' => plain += "&gt;",
            '_' if is_word(at.checked_sub(1)) && is_word(Some(at + 1)) => plain.push('_'),
            '\\' | '`' | '*' | '_' | '~' => plain.extend(['\\', *letter]),
            // Markdown makes a link of brackets and a parenthesis: one of them is enough to escape.
            '(' if at > 0 && letters[at - 1] == ']' => plain += "\\(",
            letter => plain.push(*letter),
        }
    }
    plain
}
