//! One page that needs nothing else: it opens from a file, without a network.

use super::history::{History, Run};
use super::picture::{layout, legend};
use super::program::program;
use super::timeline::timeline;
use super::{Broken, COUNTS, FaultReport, Host, KNOWN, LeftOut, Report, Summary, escaped, native};
use crate::{Bar, Case, Coverage, PROPERTIES, PairReport, PropertyReport, Verdict, property, words};
use std::fmt::Write;

/// The page around its sections.
const PAGE: &str = r#"<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"#;

/// Returns the page of a run.
pub(super) fn page(report: &Report, history: &History) -> String {
    let commit = report.host.commit.as_ref().map_or(String::new(), |commit| format!(", commit {commit}"));
    let title = format!("truebridge {}{commit}: conformance on {}", env!("CARGO_PKG_VERSION"), report.device);
    let body = [
        heading(report, &title),
        failures(report),
        comparison(report),
        pairs(report),
        coverage(report),
        histogram(report),
        faults(&report.faults),
        left_out(&report.left_out),
        runs(&history.runs),
    ];
    let page = PAGE.replace("{style}", include_str!("page.css"));
    page.replace("{title}", &escaped(&title)).replace("{body}", &body.concat())
}

fn heading(report: &Report, title: &str) -> String {
    let Host { date, os, cpu, cores, python, versions, driver, gpus, .. } = &report.host;
    let driver = driver.iter().map(|driver| format!("driver {driver}"));
    let host: Vec<_> =
        gpus.iter().cloned().chain(driver).chain([format!("{cpu} ({cores} cores)"), os.clone()]).collect();
    let versions: Vec<_> = versions.iter().map(|(name, version)| format!("{name} {version}")).collect();
    let Summary { passed, failed, expected, cases } = report.summary;
    let bad = if failed > 0 { "bad" } else { "soft" };
    format!(
        "<h1>{}</h1>\n<p class=\"counts\"><span class=\"good\"><b>{passed}</b> passed</span> \
         <span class=\"{bad}\"><b>{failed}</b> failed</span> <span class=\"soft\"><b>{expected}</b> failed as expected</span> \
         <span class=\"soft\"><b>{cases}</b> cases</span></p>\n<p class=\"soft\">{}. Python {}, {}. {}, seed {}.</p>\n",
        escaped(title),
        escaped(&host.join(", ")),
        escaped(python),
        escaped(&versions.join(", ")),
        escaped(date),
        report.seed,
    )
}

fn failures(report: &Report) -> String {
    let all = report.failures();
    let cards: String = all.iter().map(card).collect();
    let none = if all.is_empty() { "<p class=\"good\">None.</p>\n" } else { "" };
    format!("<section id=\"failures\">\n<h2>Failures</h2>\n{none}{cards}</section>\n")
}

fn card(failure: &Broken<'_>) -> String {
    let Broken { name, reason, case, kept, replay, is_known, .. } = failure;
    let (class, known) = match is_known {
        true => ("card known", format!(" <span class=\"soft\">{KNOWN}</span>")),
        false => ("card", String::new()),
    };
    let title = escaped(&failure.full_title());
    let mut text = format!("<article class=\"{class}\">\n<h3>{title}{known}</h3>\n<dl class=\"told\">\n");
    let mut tell = |what: &str, said: &str| text += &format!("<dt>{what}</dt><dd>{}</dd>\n", escaped(said));
    if let Some((case, _, [from, to])) = case {
        tell("What was called", &format!("{from} → {to}, of {}; {}", case.spec, words::copy(case.copy)));
    }
    tell("What came out", reason);
    if let Some(property) = property(name) {
        tell("What should have", property.doc);
    }
    text += "</dl>\n";
    if let Some((case, device, names)) = case {
        text += &match program(name, case, device, *names) {
            Ok(lines) => format!(
                "<p class=\"soft\">The same tensor by the frameworks' own functions, without truebridge:</p>\n<pre>{}</pre>\n",
                escaped(&lines)
            ),
            Err(why) => format!("<p class=\"soft\">Without truebridge: {}</p>\n", escaped(&why)),
        };
    }
    if let Some(replay) = replay {
        text += &format!("<p class=\"soft\">Run it again:</p>\n<pre class=\"command\">{}</pre>\n", escaped(replay));
    }
    if let Some((case, _, names)) = case {
        text += &picture(case, name, *names);
    }
    text.extend(
        kept.map(|kept| format!("<p class=\"soft\">The case is kept in {}.</p>\n", escaped(&kept.to_string_lossy()))),
    );
    text + "</article>\n"
}

/// Shows a case: its tensor in words and as a picture, its streams, and all of it as data.
fn picture(case: &Case, property: &str, names: [&str; 2]) -> String {
    let spec = &case.spec;
    let mut facts = vec![spec.to_string(), format!("{} in the base buffer", words::counted(spec.base, "element"))];
    facts.extend(
        (spec.align > 0)
            .then(|| format!("which begins {} after a multiple of 128", words::counted(spec.align, "byte"))),
    );
    facts.extend(spec.read_only.then(|| "read-only".to_owned()));
    facts.extend(spec.pending.map(|pending| format!("deferred: {}", words::pending(pending))));
    facts.push(format!("requested: {}", words::copy(case.copy)));
    facts.push(format!("seed {}", case.seed));
    let pieces: String =
        case.pieces.iter().map(|pieces| format!("<li>{}</li>", escaped(&pieces.to_string()))).collect();
    let pieces = match pieces.is_empty() {
        true => pieces,
        false => format!("<p class=\"soft\">Copied {}:</p>\n<ul>{pieces}</ul>\n", words::calls(case.calls)),
    };
    let data = serde_json::to_string_pretty(case).unwrap_or_default();
    format!(
        "<p class=\"soft\">{}</p>\n<div class=\"scroll\">{}</div>\n<p class=\"soft\">{}</p>\n{pieces}{}\n\
         <details><summary>The case as data</summary><pre>{}</pre></details>\n",
        escaped(&facts.join("; ")),
        layout(spec),
        legend(spec),
        timeline(property, case, names).unwrap_or_default(),
        escaped(&data),
    )
}

fn comparison(report: &Report) -> String {
    let Some(comparison) = &report.comparison else { return String::new() };
    let list = |class: &str, lines: &[String]| {
        let items: String = lines.iter().map(|line| format!("<li class=\"{class}\">{}</li>", escaped(line))).collect();
        if items.is_empty() { items } else { format!("<ul>{items}</ul>\n") }
    };
    format!(
        "<section id=\"baseline\">\n<h2>Since the baseline</h2>\n<p>{}</p>\n{}{}{}</section>\n",
        escaped(&comparison.heading()),
        list("bad", &comparison.worse),
        list("good", &comparison.better),
        list("soft", &comparison.as_before.iter().map(|title| format!("{title}: {KNOWN}")).collect::<Vec<_>>()),
    )
}

/// The matrix: pairs down, properties across. Below a verdict stands how often the frameworks' own method was wrong.
fn pairs(report: &Report) -> String {
    let judged =
        |name: &&str| report.pairs.iter().flat_map(|pair| &pair.properties).any(|property| property.name == **name);
    let mut names: Vec<&str> = PROPERTIES.iter().map(|property| property.name).filter(judged).collect();
    for property in report.pairs.iter().flat_map(|pair| &pair.properties) {
        if !names.contains(&property.name.as_str()) {
            names.push(&property.name);
        }
    }
    if names.is_empty() {
        return String::new();
    }
    let idle = idle(report, &names);
    names.retain(|name| !idle.iter().any(|(_, all)| all.contains(name)));
    let heading = |name: &&str| {
        format!("<th scope=\"col\"><div>{}<small>{}</small></div></th>", escaped(name), escaped(states(name)))
    };
    let heading: String = names.iter().map(heading).collect();
    let row = |pair: &PairReport| {
        let cells: String = names.iter().map(|name| cell(pair, name)).collect();
        format!("<tr><th scope=\"row\">{} → {}</th>{cells}</tr>\n", escaped(&pair.from), escaped(&pair.to))
    };
    let rows: String = report.pairs.iter().map(row).collect();
    let has_native = report.pairs.iter().flat_map(|pair| &pair.properties).any(|property| property.native.is_some());
    let native = if has_native { " Below: the frameworks' own method in the same cases." } else { "" };
    let idle: Vec<_> = idle.iter().map(|(reason, all)| format!("{} ({reason})", all.join(", "))).collect();
    let idle = match idle.is_empty() {
        true => String::new(),
        false => {
            let all = escaped(&idle.join("; "));
            format!("<p class=\"soft\">Without a column, because they were judged for no pair: {all}.</p>\n")
        }
    };
    format!(
        "<section id=\"pairs\">\n<h2>Pairs</h2>\n<p class=\"soft\">✓ passed, ✗ failed, † the process died, ○ failed as \
         expected, · does not apply.{native}</p>\n<div class=\"scroll\"><table class=\"matrix\"><thead><tr><th></th>\
         {heading}</tr></thead>\n<tbody>\n{rows}</tbody></table></div>\n{idle}</section>\n"
    )
}

/// Returns what a property states. The entry for a worker that could judge nothing is none.
fn states(name: &str) -> &'static str {
    property(name).map_or("the process that judges the pair", |property| property.doc)
}

/// Returns the properties that apply to no pair, by the first reason of each: the matrix has no column for them.
fn idle<'a>(report: &'a Report, names: &[&'a str]) -> Vec<(&'a str, Vec<&'a str>)> {
    let mut idle: Vec<(&str, Vec<&str>)> = Vec::new();
    for name in names {
        let of = |pair: &'a PairReport| pair.properties.iter().filter(|property| property.name == *name);
        if report.pairs.iter().flat_map(of).any(|property| property.verdict != Verdict::NotApplicable) {
            continue;
        }
        let reason = report.pairs.iter().flat_map(of).find_map(|property| property.reason.as_deref());
        let reason = reason.unwrap_or("does not apply");
        match idle.iter_mut().find(|(known, _)| *known == reason) {
            Some((_, all)) => all.push(name),
            None => idle.push((reason, vec![name])),
        }
    }
    idle
}

fn cell(pair: &PairReport, name: &str) -> String {
    let Some(property) = pair.properties.iter().find(|property| property.name == name) else {
        return "<td></td>".into();
    };
    let (class, mark, word) = match property.verdict {
        Verdict::Passed => ("good", "✓", "passed"),
        Verdict::Failed => ("bad", "✗", "failed"),
        Verdict::Crashed => ("bad", "†", "crashed"),
        Verdict::Expected => ("warn", "○", "failed as expected"),
        Verdict::NotApplicable => ("soft", "·", "does not apply"),
    };
    let PropertyReport { cases, reason, .. } = property;
    let reason = reason.as_ref().map_or(String::new(), |reason| format!(": {reason}"));
    let native = property.native.map_or(String::new(), |counts| {
        let class = if counts.wrong > 0 { "bad" } else { "soft" };
        format!("<small class=\"{class}\">{}</small>", native(counts))
    });
    let title = escaped(&format!("{word}, {cases} cases{reason}"));
    format!("<td class=\"{class}\" data-name=\"{}\" title=\"{title}\">{mark}{native}</td>", escaped(name))
}

fn coverage(report: &Report) -> String {
    let bar = |Coverage { in_place, copied, refused, .. }: Coverage| {
        let all = (in_place + copied + refused).max(1);
        let part = |class: &str, count: u32| {
            format!("<i class=\"{class}\" style=\"width:{:.1}%\"></i>", f64::from(count) / f64::from(all) * 100.0)
        };
        let parts = [part("in-place", in_place), part("copied", copied), part("refused", refused)].concat();
        format!("<td><div class=\"bar\">{parts}</div></td>")
    };
    let counts = |cases: u32, seen: Coverage| {
        let numbers = [cases, seen.in_place, seen.copied, seen.refused];
        numbers.iter().map(|number| format!("<td class=\"number\">{number}</td>")).collect::<String>() + &bar(seen)
    };
    let heading = |first: &str| {
        let columns = ["cases", "in place", "copied", "refused"];
        let columns: String = columns.iter().map(|name| format!("<th class=\"number\">{name}</th>")).collect();
        format!("<thead><tr>{first}{columns}<th></th></tr></thead>")
    };
    let all = report.coverage();
    if all.is_empty() {
        return String::new();
    }
    let row = |(name, cases, seen): &(&str, u32, Coverage)| {
        format!("<tr><th scope=\"row\">{}</th>{}</tr>\n", escaped(name), counts(*cases, *seen))
    };
    let rows: String = all.iter().map(row).collect();
    let mut each = String::new();
    for pair in &report.pairs {
        for property in pair.properties.iter().filter(|property| property.cases > 0) {
            let (name, counts) = (escaped(&property.name), counts(property.cases, property.coverage));
            let _ = writeln!(
                each,
                "<tr><td>{} → {}</td><td>{name}</td>{counts}</tr>",
                escaped(&pair.from),
                escaped(&pair.to)
            );
        }
    }
    format!(
        "<section id=\"coverage\">\n<h2>Coverage</h2>\n<p class=\"soft key\">Cases that were converted <i class=\"in-place\"></i>in \
         place <i class=\"copied\"></i>as a copy <i class=\"refused\"></i>with an error</p>\n\
         <p class=\"soft\">{COUNTS}</p>\n<div class=\"scroll\"><table>{}<tbody>\
         {rows}</tbody></table></div>\n<details><summary>Every pair</summary><div class=\"scroll\"><table>{}<tbody>{each}\
         </tbody></table></div></details>\n</section>\n",
        heading("<th></th>"),
        heading("<th>pair</th><th>property</th>"),
    )
}

/// Which cases were run: a kind that is missing is a hole.
fn histogram(report: &Report) -> String {
    if report.histogram.is_empty() {
        return String::new();
    }
    let row = |bar: &Bar| {
        let Bar { by, kind, pairs, cases, coverage: Coverage { in_place, copied, refused, .. } } = bar;
        let numbers = [pairs, cases, in_place, copied, refused];
        let numbers: String = numbers.iter().map(|number| format!("<td class=\"number\">{number}</td>")).collect();
        format!("<tr><td>{}</td><th scope=\"row\">{}</th>{numbers}</tr>\n", escaped(by), escaped(kind))
    };
    let rows: String = report.histogram.bars().into_iter().map(row).collect();
    let columns = ["pairs", "cases", "in place", "copied", "refused"];
    let columns: String = columns.iter().map(|name| format!("<th class=\"number\">{name}</th>")).collect();
    format!(
        "<section id=\"cases\">\n<h2>Cases</h2>\n<details><summary>Which cases were run</summary><div class=\"scroll\"><table>\
         <thead><tr><th></th><th></th>{columns}</tr></thead>\n<tbody>{rows}</tbody></table></div></details>\n</section>\n"
    )
}

fn faults(faults: &[FaultReport]) -> String {
    if faults.is_empty() {
        return String::new();
    }
    let row = |fault: &FaultReport| {
        let (class, word) = if fault.is_caught() { ("good", "caught") } else { ("bad", "survived") };
        let (name, by) = (escaped(&fault.fault), escaped(&fault.must_be_caught_by));
        let all = escaped(&fault.caught_by.join(", "));
        format!("<tr><td class=\"{class}\">{word}</td><td>{name}</td><td>{by}</td><td class=\"wide\">{all}</td></tr>\n")
    };
    let caught = faults.iter().filter(|fault| fault.is_caught()).count();
    let rows: String = faults.iter().map(row).collect();
    format!(
        "<section id=\"faults\">\n<h2>Planted faults</h2>\n<details><summary>{caught} of {} caught</summary>\
         <div class=\"scroll\"><table><thead><tr><th></th><th>fault</th><th>to be caught by</th><th>caught by</th></tr></thead>\
         <tbody>{rows}</tbody></table></div></details>\n</section>\n",
        faults.len()
    )
}

fn left_out(left: &[LeftOut]) -> String {
    if left.is_empty() {
        return String::new();
    }
    let row = |LeftOut { adapter, reason }: &LeftOut| {
        format!("<tr><td>{}</td><td class=\"wide\">{}</td></tr>\n", escaped(adapter), escaped(reason))
    };
    let rows: String = left.iter().map(row).collect();
    format!(
        "<section id=\"left-out\">\n<h2>Left out</h2>\n<div class=\"scroll\"><table><tbody>\n{rows}</tbody></table></div>\n</section>\n"
    )
}

/// Pixels of a run in the picture of all runs.
const RUN: usize = 14;

fn runs(runs: &[Run]) -> String {
    let mut svg =
        format!(r#"<svg class="runs" width="{}" height="26" role="img" aria-label="the runs">"#, runs.len() * RUN);
    for (number, run) in runs.iter().enumerate() {
        let class = if run.summary.failed > 0 { "failed" } else { "passed" };
        let _ =
            write!(svg, r#"<rect class="{class}" x="{}" y="2" width="{}" height="22" rx="2"/>"#, number * RUN, RUN - 3);
    }
    let row = |run: &Run| {
        let Run { date, device, seed, pairs, summary: Summary { passed, failed, cases, .. }, failures } = run;
        let class = if *failed > 0 { "bad" } else { "good" };
        format!(
            "<tr><td>{}</td><td>{}</td><td class=\"number\">{seed}</td><td class=\"number\">{pairs}</td><td class=\"number\">{cases}\
             </td><td class=\"number\">{passed}</td><td class=\"number {class}\">{failed}</td><td class=\"wide\">{}</td></tr>\n",
            escaped(date),
            escaped(device),
            escaped(&failures.join("; ")),
        )
    };
    let rows: String = runs.iter().rev().map(row).collect();
    let columns: String = ["date", "device", "seed", "pairs", "cases", "passed", "failed", ""]
        .iter()
        .map(|name| format!("<th>{name}</th>"))
        .collect();
    format!(
        "<section id=\"history\">\n<h2>Runs into this folder</h2>\n<div class=\"scroll\">{svg}</svg></div>\n<div class=\"scroll\"><table>\
         <thead><tr>{columns}</tr></thead><tbody>\n{rows}</tbody></table></div>\n</section>\n"
    )
}
